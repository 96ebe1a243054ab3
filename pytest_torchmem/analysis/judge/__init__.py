"""Results against limits, baselines and each other."""
