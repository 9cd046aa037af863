"""An adapter as peft loads it."""

from __future__ import annotations

import logging
from unittest import mock

from orchestrator.export import peft_adapter


def test_peft_tells_nothing_of_four_bits_where_there_are_none() -> None:
    """It imports bitsandbytes whatever it loads, which warns of kernels that it does not find."""
    import peft

    logger = logging.getLogger("bitsandbytes")
    logger.setLevel(logging.WARNING)
    levels = []
    with mock.patch.object(peft.PeftModel, "from_pretrained") as loaded:
        loaded.side_effect = lambda *_, **__: levels.append(logger.level) or mock.Mock()
        peft_adapter._with(None, "folder", 0)
    assert levels == [logging.ERROR]
