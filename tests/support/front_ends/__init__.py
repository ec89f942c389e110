"""What does a `Run` on one rank: a module for each front end, whose `train(rank, run)` it is."""

FRONT_ENDS = ("plain", "sharded", "lightning", "fabric", "accelerate", "transformers", "deepspeed")
