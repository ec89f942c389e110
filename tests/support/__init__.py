"""What tests are written with.

The harness: `workers.py` runs a function on several ranks under a deadline, `launched.py` is a program that starts its
ranks itself, `many.py` gives a test random runs, `inside.py` is all that tests know of the packages' private names.
What is trained: `run.py` describes a run once, and does it in one process; each module of `front_ends` does it on a
rank, and has what only that front end can be told. `drawn.py` draws runs. `sharded.py` has the runs of models that are
sharded, `sharded_search.py` draws them, and `joint.py` those whose losses come from all ranks together.
`collectives.py` and `party.py` are about single collectives, and `joinables.py` about what is written against torch's
protocol.
"""
