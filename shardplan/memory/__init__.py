"""What a device holds in memory."""
