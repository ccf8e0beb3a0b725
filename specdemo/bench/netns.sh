#!/bin/sh
# Edge and cloud in two network namespaces, over a pair of virtual interfaces with delay and loss from the kernel:
#   sudo specdemo/bench/netns.sh [netem options, default: delay 15ms 2ms loss 1%]
# Says for each exact mode whether the text is that of decoding at hand. Needs iproute2 and the module sch_netem;
# without the module the link is as fast as it comes, and the script says so.
set -eu
PYTHON=${PYTHON:-.venv/bin/python}
EDGE=specdemo-edge-$$ CLOUD=specdemo-cloud-$$
WORK=$(mktemp -d)
SERVICE=
clean() {
    [ -z "$SERVICE" ] || kill "$SERVICE" 2>/dev/null || true
    ip netns del $EDGE 2>/dev/null || true
    ip netns del $CLOUD 2>/dev/null || true
    rm -rf "$WORK"
}
trap clean EXIT
trap 'exit 1' INT TERM
ip netns add $EDGE
ip netns add $CLOUD
ip link add name edge0 netns $EDGE type veth peer name cloud0 netns $CLOUD
ip -n $EDGE addr add 10.77.0.1/24 dev edge0
ip -n $CLOUD addr add 10.77.0.2/24 dev cloud0
ip -n $EDGE link set edge0 up
ip -n $CLOUD link set cloud0 up
ip -n $CLOUD link set lo up
# shellcheck disable=SC2086  # options are meant to be several words
if ! { ip netns exec $EDGE tc qdisc add dev edge0 root netem ${*:-delay 15ms 2ms loss 1%} &&
    ip netns exec $CLOUD tc qdisc add dev cloud0 root netem ${*:-delay 15ms 2ms loss 1%}; }; then
    echo "this kernel has no netem: the link has no delay of its own"
fi
mkfifo "$WORK/said"
ip netns exec $CLOUD "$PYTHON" -m specdemo serve --host 10.77.0.2 --port 8300 >"$WORK/said" &
SERVICE=$!
read -r line <"$WORK/said"
echo "$line"
PROMPT='def read_lines(path):'
failed=0
for mode in "--temperature 0" "--temperature 0 --method nasd" "--temperature 0 --method tree" \
    "--temperature 1 --top-p 1 --rule coupled" "--temperature 0.7 --rule coupled --method nasd"; do
    # shellcheck disable=SC2086
    ip netns exec $EDGE "$PYTHON" -m specdemo run "$PROMPT" $mode --max-tokens 64 --encoding msgpack \
        --remote http://10.77.0.2:8300 --trace "$WORK/far" >/dev/null
    # shellcheck disable=SC2086
    "$PYTHON" -m specdemo run "$PROMPT" $mode --method ar --max-tokens 64 --trace "$WORK/near" >/dev/null
    "$PYTHON" - "$mode" "$WORK/far" "$WORK/near" <<'CHECK' || failed=1
import json, statistics, sys

far, near = ([json.loads(line) for line in open(path)] for path in sys.argv[2:])
texts = [[token for line in lines for token in line.get("tokens", [])] for lines in (far, near)]
rtt = statistics.median(line["remote"]["rtt_s"] for line in far if "i" in line)
same = "the same text" if texts[0] == texts[1] else "ANOTHER TEXT"
print(f"{sys.argv[1]}: {same}, {len(texts[0])} tokens, median time on the wire {1000 * rtt:.1f} ms")
sys.exit(texts[0] != texts[1])
CHECK
done
exit $failed
