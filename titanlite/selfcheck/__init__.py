"""Test of the machines before an expensive job: `titanlite check --machines`."""
