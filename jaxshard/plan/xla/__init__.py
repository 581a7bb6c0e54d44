"""What XLA does to a program before it runs it, by platform, as far as a plan counts it."""
