"""What a run would need and how fast it would go, worked out before any machine is rented."""
