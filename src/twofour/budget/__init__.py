"""What each layer loses when it is pruned alone, what that saves, and the set a budget allows."""
