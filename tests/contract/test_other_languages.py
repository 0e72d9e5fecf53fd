"""The contract in other languages: `buf lint`, a client of Node, one of Go.

Each needs its own tools and is skipped without them: npm with node; Debian's golang-go,
golang-google-grpc-dev, golang-google-protobuf-dev, protoc-gen-go and protoc-gen-go-grpc.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gateway_rig import gateway
from scripted_decode import ScriptedDecode, saying

ROOT = Path(__file__).parents[2]
NPM_PACKAGES = ("@bufbuild/buf@1.75.0", "@grpc/grpc-js@1.14.7", "@grpc/proto-loader@0.8.1")
INSTALL_SECONDS = 280
GO_SECONDS = 600
GO_SOURCES = Path("/usr/share/gocode")
"""Where Debian puts Go libraries."""
NODE_CLIENT = r"""
const grpc = require("@grpc/grpc-js"), loader = require("@grpc/proto-loader");
const [root, address] = process.argv.slice(2);
const files = ["baton/v1/inference.proto", "google/rpc/status.proto", "google/rpc/error_details.proto"];
const loaded = loader.loadSync(files, { includeDirs: [root], oneofs: true });
const { baton } = grpc.loadPackageDefinition(loaded);
const client = new baton.v1.Inference(address, grpc.credentials.createInsecure());
const deadline = () => ({ deadline: Date.now() + 20000 });
const start = { text: "hello", sampling: { maxTokens: 2 } };

client.Complete({ start }, deadline(), (error, answer) => {
  if (error) throw error;
  const events = [];
  const call = client.Stream({ start }, deadline());
  call.on("data", (event) => events.push(event.kind));
  call.on("end", () => {
    client.Complete({ start: { text: "x", sampling: { temperature: -1 } } }, deadline(), (failed) => {
      const bytes = failed.metadata.get("grpc-status-details-bin")[0];
      const status = loaded["google.rpc.Status"].deserialize(bytes);
      const details = Object.fromEntries(status.details.map((each) => {
        const name = each.type_url.split("/").pop();
        return [name, loaded[name].deserialize(each.value)];
      }));
      const field = details["google.rpc.BadRequest"].fieldViolations[0].field;
      const said = { tokens: answer.choices[0].tokenIds, events, code: failed.code, field };
      console.log(JSON.stringify({ ...said, domain: details["google.rpc.ErrorInfo"].domain }));
      client.close();
    });
  });
});
"""


GO_CLIENT = r"""
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	pb "baton/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// Debian's gRPC encodes with an older protobuf than its protoc-gen-go writes for, and panics at a oneof.
type codec struct{}

func (codec) Name() string { return "proto" }

func (codec) Marshal(v interface{}) ([]byte, error) { return proto.Marshal(v.(proto.Message)) }

func (codec) Unmarshal(data []byte, v interface{}) error {
	return proto.Unmarshal(data, v.(proto.Message))
}

func init() { encoding.RegisterCodec(codec{}) }

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func main() {
	connection, err := grpc.Dial(os.Args[1], grpc.WithInsecure())
	check(err)
	client := pb.NewInferenceClient(connection)
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	most := int64(2)
	sampling := &pb.SamplingParams{MaxTokens: &most}
	start := &pb.GenerateStart{Prompt: &pb.GenerateStart_Text{Text: "hello"}, Sampling: sampling}
	answer, err := client.Complete(ctx, &pb.CompleteRequest{Start: start})
	check(err)
	fmt.Println(answer.Choices[0].TokenIds)
	stream, err := client.Stream(ctx, &pb.StreamRequest{Start: start})
	check(err)
	last := ""
	for {
		event, err := stream.Recv()
		if err == io.EOF {
			break
		}
		check(err)
		last = fmt.Sprintf("%T", event.Kind)
	}
	fmt.Println(last)
	cold := float32(-1)
	sampling.Temperature = &cold
	_, err = client.Complete(ctx, &pb.CompleteRequest{Start: start})
	fmt.Println(status.Code(err), len(status.Convert(err).Details()) > 0)
}
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages of npm."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("npm")
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", *NPM_PACKAGES]
    installed = subprocess.run(command, cwd=folder, timeout=INSTALL_SECONDS, capture_output=True, text=True)
    if installed.returncode != 0:
        pytest.skip(f"npm cannot install: {installed.stderr.strip()[-200:]}")
    return folder


@pytest.mark.thorough
def test_buf_lint(packages: Path):
    buf = packages / "node_modules" / ".bin" / "buf"
    done = subprocess.run([buf, "lint"], cwd=ROOT, timeout=240, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.thorough
async def test_a_client_of_node(packages: Path):
    (packages / "client.js").write_text(NODE_CLIENT)
    async with ScriptedDecode(saying([40, 41])) as decode, gateway(decode) as rig:
        node = await asyncio.create_subprocess_exec(
            "node", "client.js", str(ROOT / "proto"), rig.node.address, cwd=packages, stdout=-1, stderr=-1
        )
        out, err = await asyncio.wait_for(node.communicate(), 120)
    assert node.returncode == 0, err.decode()
    said = json.loads(out)
    assert said.pop("tokens") == [40, 41]
    events = said.pop("events")
    assert events[0] == "accepted" and events[-1] == "finished" and "delta" in events
    assert said == {"code": 3, "field": "sampling.temperature", "domain": "baton.v1"}


@pytest.fixture
def go_client(tmp_path: Path) -> Path:
    """The program, compiled with stubs."""
    missing = [name for name in ("go", "protoc-gen-go", "protoc-gen-go-grpc") if shutil.which(name) is None]
    if not (GO_SOURCES / "src" / "google.golang.org" / "grpc").is_dir():
        missing.append("golang-google-grpc-dev")
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    out = tmp_path / "src"
    out.mkdir()
    sources = sorted(str(path) for path in (ROOT / "proto" / "baton" / "v1").glob("*.proto"))
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}"]
    subprocess.run([*protoc, f"--go_out={out}", f"--go-grpc_out={out}", *sources], timeout=240, check=True)
    go = {"GO111MODULE": "off", "GOFLAGS": "", "GOPATH": f"{tmp_path}:{GO_SOURCES}"}
    (out / "client").mkdir()
    (out / "client" / "main.go").write_text(GO_CLIENT)
    run = {"env": os.environ | go, "timeout": GO_SECONDS, "capture_output": True, "text": True}
    program = tmp_path / "program"
    done = subprocess.run(["go", "build", "-o", program, "client"], **run)
    assert done.returncode == 0, done.stderr
    return program


@pytest.mark.thorough
@pytest.mark.timeout(GO_SECONDS)
async def test_a_client_of_go(go_client: Path):
    async with ScriptedDecode(saying([40, 41])) as decode, gateway(decode) as rig:
        client = await asyncio.create_subprocess_exec(go_client, rig.node.address, stdout=-1, stderr=-1)
        said, err = await asyncio.wait_for(client.communicate(), 120)
    assert client.returncode == 0, err.decode()
    ended = "*batonv1.StreamResponse_Finished"
    assert said.decode().splitlines() == ["[40 41]", ended, "InvalidArgument true"]
