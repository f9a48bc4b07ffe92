"""What the library is held against: one device with plain torch, and a second, plain implementation."""
