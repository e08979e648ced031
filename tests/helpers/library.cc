// Operators for mx.library.load: one draws and writes a state, one counts its calls in its own state.
#include <random>

#include "mxnet/lib_api.h"

using namespace mxnet::ext;

typedef std::unordered_map<std::string, std::string> Attributes;
typedef std::vector<std::vector<unsigned int>> Shapes;
typedef std::vector<MXTensor> Tensors;

static void times(Tensors* in, Tensors* out, float factor, float summand) {
  float *x = in->at(0).data<float>(), *y = out->at(0).data<float>();
  for (int64_t i = 0; i < in->at(0).size(); ++i) y[i] = factor * x[i] + summand;
}

static MXReturnValue one_input(const Attributes&, int* in, int* out) {
  *in = *out = 1;
  return MX_SUCCESS;
}

static MXReturnValue two_inputs(const Attributes&, int* in, int* out) {
  *in = 2;
  *out = 1;
  return MX_SUCCESS;
}

static MXReturnValue dtype(const Attributes&, std::vector<int>* in, std::vector<int>* out) {
  for (int& one : *in) one = kFloat32;
  out->at(0) = kFloat32;
  return MX_SUCCESS;
}

static MXReturnValue storage(const Attributes&, std::vector<int>* in, std::vector<int>* out) {
  for (int& one : *in) one = kDefaultStorage;
  for (int& one : *out) one = kDefaultStorage;
  return MX_SUCCESS;
}

static MXReturnValue shape(const Attributes&, Shapes* in, Shapes* out) {
  if (in->size() > 1) in->at(1) = {1};
  out->at(0) = in->at(0);
  return MX_SUCCESS;
}

static MXReturnValue mutated(const Attributes&, std::vector<int>* places) {
  places->push_back(1);
  return MX_SUCCESS;
}

static MXReturnValue noise(const Attributes&, Tensors* in, Tensors* out, const OpResource& resource) {
  float* state = in->at(1).data<float>();
  state[0] += 1;
  times(in, out, 1, state[0] + std::normal_distribution<float>()(*resource.get_cpu_rand_states()));
  return MX_SUCCESS;
}

static MXReturnValue noise_back(const Attributes&, Tensors* in, Tensors* out, const OpResource&) {
  times(in, out, 1, 0);
  out->at(1).data<float>()[0] = 0;
  return MX_SUCCESS;
}

class Count : public CustomStatefulOp {
 public:
  MXReturnValue Forward(Tensors* in, Tensors* out, const OpResource&) override {
    times(in, out, ++count, 0);
    return MX_SUCCESS;
  }
  MXReturnValue Backward(Tensors* in, Tensors* out, const OpResource&) override {
    times(in, out, count, 0);
    return MX_SUCCESS;
  }

 private:
  float count = 0;
};

static MXReturnValue create(const Attributes&, const MXContext&, const Shapes&,
                            const std::vector<int>, CustomStatefulOp** op) {
  *op = CustomStatefulOp::create<Count>();
  return MX_SUCCESS;
}

REGISTER_OP(memplan_noise)
    .setForward(noise, "cpu")
    .setBackward(noise_back, "cpu")
    .setParseAttrs(two_inputs)
    .setInferType(dtype)
    .setInferSType(storage)
    .setInferShape(shape)
    .setMutateInputs(mutated);

REGISTER_OP(memplan_count)
    .setParseAttrs(one_input)
    .setInferType(dtype)
    .setInferShape(shape)
    .setCreateOpState(create, "cpu");

MXReturnValue initialize(int version) { return version >= 10700 ? MX_SUCCESS : MX_FAIL; }
