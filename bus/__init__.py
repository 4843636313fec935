"""The message bus: versioned weight-update events between one controller and many peers."""
