"""The plan and its hardware profile against the compiled program and measured devices."""
