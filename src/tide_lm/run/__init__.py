"""What a run is made of: its settings, its folder, its checkpoints, its processes."""
