"""Events of the page. Errors of Gradio, which quote the values of visitors, become sentences."""

from __future__ import annotations

from typing import Any

import gradio as gr

from specdemo.core.errors import UserError
from specdemo.ui.streams import error_sentence
from specdemo.worker import WorkerBusy


class PageBlocks(gr.Blocks):
    """Gradio blocks that answer every malformed event with a sentence; logs quote no visitor."""

    async def process_api(self, *args: Any, **options: Any) -> dict[str, Any]:
        try:
            return await super().process_api(*args, **options)
        except gr.Error as error:
            raise gr.Error(error.message, title=error.title, print_exception=False) from None
        except (UserError, WorkerBusy, OSError) as error:
            raise gr.Error(error_sentence(error), print_exception=False) from None
        except Exception as error:
            error_sentence(error)  # logs it
            raise gr.Error("the page cannot use these values: reload it", print_exception=False) from None
