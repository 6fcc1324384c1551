"""What a person must put right before training can start or go on.

The tree::

    SetupError (ValueError)
      ModelError          an unknown preset, a bad override, a custom model that breaks the contract
      DataError           missing or empty data, an unknown format
      ExtraMissing        an optional package that is not installed
      DeviceError         a device or precision that this machine does not have
      SavedStateError     a saved state that is damaged, or of another run, peer or model

Every message states what was expected, what was found and what to do.
"""


class SetupError(ValueError):
    """The base of all errors that a person, not the program, has to resolve."""


class ModelError(SetupError):
    """The model of the run cannot be built as the spec describes it."""


class DataError(SetupError):
    """The data of the run cannot be read as the spec describes it."""


class ExtraMissing(SetupError):  # noqa: N818
    """A command, a format or a tokenizer needs a package that comes with an extra."""


class DeviceError(SetupError):
    """This machine lacks the device or the number format that was asked for."""


class SavedStateError(SetupError):
    """A saved state cannot be used."""
