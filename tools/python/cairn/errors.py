class CairnError(ValueError):
    """The call or the input is wrong; the message names the file and what to do."""


class Damaged(CairnError):
    """A file is cut, or its bytes differ from their checksum."""


def demand(condition, message, error=Damaged):
    if not condition:
        raise error(message)
