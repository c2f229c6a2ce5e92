"""Audits: plans compared with compiled programs, and hardware profiles with measured devices."""
