"""Every private name of torch and DeepSpeed that torch_join uses: one file per subject.

Each file checks its names when it is imported (`check_names`), and a test fails when one is gone.
"""
