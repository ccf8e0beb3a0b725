#!/bin/sh
# Edge and cloud in two network namespaces, over a link that delays and drops packets (docs/edge-cloud.md):
#   sudo benchmarks/netns.sh [delay, ms each way] [jitter, ms] [loss, % of packets]      (default: 15 2 1)
# Compares the text of each exact mode with local AR decoding. Requires iproute2. Packets are delayed by the kernel
# (module sch_netem) or, without this module, by relay.py.
set -eu
PYTHON=${PYTHON:-.venv/bin/python}
DELAY=${1:-15} JITTER=${2:-2} LOSS=${3:-1}
EDGE=specdemo-edge-$$ CLOUD=specdemo-cloud-$$
WORK=$(mktemp -d)
SERVICE='' RELAY=''
clean() {
    for process in $SERVICE $RELAY; do kill "$process" 2>/dev/null || true; done
    ip netns del $EDGE 2>/dev/null || true
    ip netns del $CLOUD 2>/dev/null || true
    rm -rf "$WORK"
}
trap clean EXIT
trap 'exit 1' INT TERM
ip netns add $EDGE
ip netns add $CLOUD
ip -n $CLOUD link set lo up
mkfifo "$WORK/relay" "$WORK/service"
if tc -n $EDGE qdisc add dev lo root netem delay 1ms 2>/dev/null; then # test only
    ip link add name edge0 netns $EDGE type veth peer name cloud0 netns $CLOUD
    ip -n $EDGE addr add 10.77.0.1/24 dev edge0
    ip -n $CLOUD addr add 10.77.0.2/24 dev cloud0
    ip -n $EDGE link set edge0 up
    ip -n $CLOUD link set cloud0 up
    tc -n $EDGE qdisc add dev edge0 root netem delay "${DELAY}ms" "${JITTER}ms" loss "$LOSS%"
    tc -n $CLOUD qdisc add dev cloud0 root netem delay "${DELAY}ms" "${JITTER}ms" loss "$LOSS%"
    echo "the kernel delays the packets"
else
    "$PYTHON" "$(dirname "$0")/relay.py" $EDGE $CLOUD \
        --delay-ms "$DELAY" --jitter-ms "$JITTER" --loss-percent "$LOSS" >"$WORK/relay" &
    RELAY=$!
    read -r _ <"$WORK/relay"
    echo "no netem in this kernel: a relay between two TUN devices delays the packets"
fi
ip netns exec $CLOUD "$PYTHON" -m specdemo serve --pair bundled --host 10.77.0.2 --port 8300 >"$WORK/service" &
SERVICE=$!
read -r line <"$WORK/service"
echo "$line"
PROMPT='def read_lines(path):'
failed=0
for mode in "--temperature 0" "--temperature 0 --method nasd" "--temperature 0 --method tree" \
    "--temperature 1 --top-p 1 --rule coupled" "--temperature 0.7 --rule coupled --method nasd"; do
    # shellcheck disable=SC2086  # options are meant to be several words
    ip netns exec $EDGE "$PYTHON" -m specdemo run "$PROMPT" --pair bundled $mode --max-tokens 64 --encoding msgpack \
        --remote http://10.77.0.2:8300 --trace "$WORK/remote" >/dev/null
    # shellcheck disable=SC2086
    "$PYTHON" -m specdemo run "$PROMPT" --pair bundled $mode --method ar --max-tokens 64 --trace "$WORK/local" >/dev/null
    "$PYTHON" - "$mode" "$WORK/remote" "$WORK/local" <<'CHECK' || failed=1
import json, statistics, sys

remote, local = ([json.loads(line) for line in open(path)] for path in sys.argv[2:])
texts = [[token for line in lines for token in line.get("tokens", [])] for lines in (remote, local)]
link = [line["remote"] for line in remote if "i" in line]
rtt = statistics.median(step["rtt_s"] for step in link)
repeated = sum(step["sent"] - 1 - step["rows"] for step in link)
equal = "same text" if texts[0] == texts[1] else "DIFFERENT TEXT"
print(
    f"{sys.argv[1]}: {equal}, {len(texts[0])} tokens in {len(link)} steps, median round trip {1000 * rtt:.1f} ms, "
    f"{repeated:.0f} requests repeated"
)
sys.exit(texts[0] != texts[1])
CHECK
done
exit $failed
