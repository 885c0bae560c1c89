"""Models, cases and stand-ins that several tests share."""
