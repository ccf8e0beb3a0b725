"""One thread for torch: the models here are tiny, and the suite shares two cores with a browser."""

import torch

torch.set_num_threads(1)

pytest_plugins = ["e2e.page_fixtures"]
