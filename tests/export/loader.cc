// Runs one signature of a SavedModel through tensorflow::LoadSavedModel, as TensorFlow Serving does.
//
//   loader <SavedModel folder> <folder with requests>
//
// A request is a folder <i>/ with `signature`, and for each input a file <name>.pb, a serialized
// TensorProto. The outputs are written beside them as <name>.out, or the error as `error`, its first
// line the name of the code.

#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/cc/saved_model/loader.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor.pb.h"
#include "tensorflow/core/public/session.h"

namespace fs = std::filesystem;
using tensorflow::Tensor;

namespace {

std::string Read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void Write(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

struct Request {
  fs::path folder;
  std::vector<std::pair<std::string, Tensor>> feeds;
  std::vector<std::string> names, fetches;
};

// The feeds and fetches of a request, or what it lacks, as TensorFlow Serving checks it.
absl::Status Prepare(const tensorflow::SavedModelBundle& bundle, Request* request) {
  const auto& signatures = bundle.GetSignatures();
  const auto found = signatures.find(Read(request->folder / "signature"));
  if (found == signatures.end()) return absl::InvalidArgumentError("unknown signature");
  for (const auto& [name, info] : found->second.inputs()) {
    const fs::path file = request->folder / (name + ".pb");
    if (!fs::exists(file)) return absl::InvalidArgumentError("missing input: " + name);
    tensorflow::TensorProto proto;
    Tensor tensor;
    if (!proto.ParseFromString(Read(file)) || !tensor.FromProto(proto))
      return absl::InvalidArgumentError("not a tensor: " + name);
    request->feeds.emplace_back(info.name(), tensor);
  }
  for (const auto& [name, info] : found->second.outputs()) {
    request->names.push_back(name);
    request->fetches.push_back(info.name());
  }
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  const fs::path requests = argv[2];
  tensorflow::SavedModelBundle bundle;
  const absl::Status loaded =
      tensorflow::LoadSavedModel({}, {}, argv[1], {"serve"}, &bundle);
  if (!loaded.ok()) {
    std::cerr << loaded << std::endl;
    return 1;
  }
  for (int i = 0; fs::exists(requests / std::to_string(i)); ++i) {
    Request request{requests / std::to_string(i)};
    std::vector<Tensor> outputs;
    absl::Status status = Prepare(bundle, &request);
    if (status.ok()) status = bundle.session->Run(request.feeds, request.fetches, {}, &outputs);
    if (!status.ok()) {
      Write(request.folder / "error", absl::StatusCodeToString(status.code()) + "\n" +
                                          std::string(status.message()));
      continue;
    }
    for (size_t k = 0; k < outputs.size(); ++k) {
      tensorflow::TensorProto proto;
      outputs[k].AsProtoTensorContent(&proto);
      Write(request.folder / (request.names[k] + ".out"), proto.SerializeAsString());
    }
  }
  return 0;
}
