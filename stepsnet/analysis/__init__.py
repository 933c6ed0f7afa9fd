"""Counting and measuring a network: complexity, memory, speed, the residual stream, and interventions."""
