"""Plans that train apart, and where that is found."""
