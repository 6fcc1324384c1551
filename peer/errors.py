"""Errors that a person must fix before training can start or continue.

    SetupError (ValueError)
      ModelError          an unknown preset, a bad override, a custom model that breaks the contract
      DataError           missing or empty data, an unknown format
      ExtraMissing        an optional package that is not installed
      DeviceError         a device or precision that this machine does not have
      SavedStateError     a saved state that is damaged, or of another run, peer or model

Every message states what was expected, what was found and what to do about it.
"""


class SetupError(ValueError):
    """Base of the errors that only a person can fix."""


class ModelError(SetupError):
    """The run's model cannot be built as the spec describes it."""


class DataError(SetupError):
    """The run's data cannot be read as the spec describes it."""


class ExtraMissing(SetupError):
    """A command, format or tokenizer needs a package from an extra that is not installed."""


class DeviceError(SetupError):
    """This machine lacks the requested device or number format."""


class SavedStateError(SetupError):
    """A saved state is damaged, or belongs to another run, peer or model."""


class PeerEvicted(ValueError):
    """The organiser has put this peer out of the run."""


class WrongRole(ValueError):
    """The invite is for another role than the one that is asked for."""


class NetworkLost(RuntimeError):
    """The process that talks to the network for a trainer has died."""
