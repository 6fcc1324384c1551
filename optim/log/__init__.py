"""The replicated log: entries and certificates, the store on disk, replay, and the replica."""
