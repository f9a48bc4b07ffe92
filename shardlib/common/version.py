"""The version of the library, also where it is not installed but lies on the path."""

VERSION = "0.1.0"
