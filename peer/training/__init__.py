"""What trains: model, data, devices, saved progress and the trainer's loop."""
