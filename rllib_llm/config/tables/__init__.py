"""The rows of the table of settings, one file for each subject."""
