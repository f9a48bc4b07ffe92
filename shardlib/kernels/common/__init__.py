"""What the operations share: dispatch, compilation, checks of arguments."""
