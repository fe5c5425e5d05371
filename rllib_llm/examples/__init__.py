"""The small environments, models and data that the runs in `tuned_examples/` and the tests use."""
