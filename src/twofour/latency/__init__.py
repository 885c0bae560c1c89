"""What samples prove."""
