"""One file per subject, each measured on the kinds of device that it has rounds for."""
