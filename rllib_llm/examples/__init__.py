"""Ready experiments as YAML files, and the small environments, models and data that they use."""
