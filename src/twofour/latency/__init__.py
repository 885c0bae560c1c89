"""What timed samples prove: ratios with intervals and noise, differences by layer, gates."""
