"""The handover of replicated state from the rank that joined last to all others; and checks that it was replicated.

Begin with: `handover.py`. `audit.py` compares what should be the same on all ranks, by digests.
"""
