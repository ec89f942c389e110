"""What does a `Run` on one rank: a module for each front end, whose `train(rank, run)` it is."""
