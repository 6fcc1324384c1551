"""A network in memory and a clock that jumps, for tests of anything built on `atoll.dht`."""
