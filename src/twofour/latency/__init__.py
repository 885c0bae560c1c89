"""What samples prove: ratios, intervals, noise, layers and gates."""
