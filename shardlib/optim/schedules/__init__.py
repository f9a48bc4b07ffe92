"""Schedules of learning rates and other hyper-parameters: functions of the step."""
