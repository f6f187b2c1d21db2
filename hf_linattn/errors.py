"""Everything this package raises on purpose: one family, each also the builtin a caller would expect."""


class LinattnError(Exception):
    """Base of every error of this package."""


class UnknownPatchError(LinattnError, ValueError):
    """No patch is registered under this name."""


class RegistrationError(LinattnError, ValueError):
    """A patch cannot be registered: its name is taken or not a name, or it is not a patch."""


class OptionError(LinattnError, ValueError):
    """An option does not exist, has the wrong type, or a value outside its range."""


class PlanError(LinattnError, ValueError):
    """A plan per layer matches nothing, overlaps, or cannot be read."""


class UnsupportedModelError(LinattnError, TypeError):
    """The model's attention cannot be patched, or not by this patch."""


class UnsupportedMaskError(LinattnError, ValueError):
    """The attention mask shows a pattern that the patch cannot express."""


class UnsupportedCallError(LinattnError, NotImplementedError):
    """A keyword of this attention call changes the maths in a way that the patch does not define."""


class CacheError(LinattnError, RuntimeError):
    """The cache and the attention do not fit each other."""


class NotPatchedError(LinattnError, RuntimeError):
    """The model is not patched, or no longer patched as a whole."""


class CheckpointError(LinattnError, ValueError):
    """A saved folder is damaged, newer than this package, or not what was asked for."""


class DataError(LinattnError, ValueError):
    """Text data is missing, empty, too short or unreadable."""


class TrainingError(LinattnError, RuntimeError):
    """Training cannot start or go on."""


class ProcessLostError(LinattnError, RuntimeError):
    """Another process of the run has ended, or does not answer."""


class VersionError(LinattnError, ImportError):
    """Another package is installed in a version that is too old, or too new."""
