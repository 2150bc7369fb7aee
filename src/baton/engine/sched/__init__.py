"""What is computed next: the waiting queue, the scheduler, and the plan of a step."""
