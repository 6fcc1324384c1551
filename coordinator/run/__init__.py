"""What a run is: spec, invite, admissions, keys and status. Peers and coordinator share it."""
