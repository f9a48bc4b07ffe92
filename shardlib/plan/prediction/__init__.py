"""The predicted time of a step."""
