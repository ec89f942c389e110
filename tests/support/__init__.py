"""What tests are written with.

The harness: `workers.py` runs a function on several ranks under a deadline, `launched.py` is a program that starts
its ranks itself, `inside.py` is all that tests know of the packages' private names. Cases and what one process
computes for them: `cases.py` and `joint.py` (Lightning), `loops.py` (plain loops), `accelerated.py` (Accelerate),
`collectives.py` and `party.py` (single collectives), `joinables.py`.
"""
