"""The rules and the evidence: one verdict per layer, totals and gates."""
