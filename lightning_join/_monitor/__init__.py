"""`JoinMonitor`: how uneven the dataloaders are, and what that costs."""
