FROM python:3.12-slim

# Without a GPU, pass the index of PyTorch's CPU wheels here: the image becomes several gigabytes smaller.
ARG PIP_EXTRA_INDEX_URL

RUN useradd --create-home --uid 1000 user && install --directory --owner=user /home/user/app
USER 1000
WORKDIR /home/user/app
ENV HOME=/home/user \
    PATH=/home/user/.local/bin:$PATH \
    HF_HOME=/home/user/.cache/huggingface \
    GRADIO_ANALYTICS_ENABLED=False \
    PYTHONUNBUFFERED=1

COPY --chown=user requirements.txt .
RUN pip install --no-cache-dir --user -r requirements.txt

COPY --chown=user . .

EXPOSE 7860
# The first process of a container ignores SIGTERM; Python ends in good order on this one.
STOPSIGNAL SIGINT
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:7860/config', timeout=4).close()"]
CMD ["python", "app.py", "--host", "0.0.0.0", "--port", "7860"]
