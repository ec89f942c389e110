"""Every private name of torch and DeepSpeed that torch_join uses: one file per subject.

Each is checked where its file is imported (`check_names`), and a test notices when one goes.
"""
