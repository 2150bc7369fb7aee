// What the library is called with: functions and the structures that they take, all by address. Python has each of the
// structures as a ctypes one with the same fields (tests/kernels/test_arguments.py compares them). Sizes and strides are
// in elements; dtypes: 0 float32, 1 bfloat16, 2 float16.
#pragma once
#include <cstdint>

namespace baton {

// An attention call of a ragged batch over a paged KV pool; AttentionCall in Python.
struct Attention {
  const void *q, *k, *v;
  void *k_pool, *v_pool, *out;
  const float* sinks;  // [num_heads] or null
  const int32_t *query_starts, *context_lens, *block_tables;
  const float *cos, *sin;        // [positions, rotary / 2] or null: q and k are rotated already
  const void *q_norm, *k_norm;   // [k_dim] or null: RMS norm of each head before the rotation
  // Null, or what heads' keys and values are made of out of latents: [num_heads][nope][v_dim], [num_heads][v_dim][up_dim].
  // Queries are those of expanded heads then, and the results too: [tokens][num_heads][up_dim].
  const void *key_up, *value_up;
  // int8: bfloat16 [blocks][kv_heads][block_size], `scale_stride` from block to block. fp8: float [kv_heads]. Else null.
  const void *k_scales, *v_scales;
  // Null, or of tokens that are nodes of a tree: [tokens] bits of the slots that each sees from `tree_starts` [num_seqs] of
  // its sequence on, its own among them; 0: in no tree. All new tokens of a sequence are in a tree, or none is.
  const uint64_t* ancestors;
  const int32_t* tree_starts;
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;  // strides
  int64_t block_stride, table_stride, scale_stride;
  int32_t dtype, num_seqs, num_heads, kv_heads, k_dim, v_dim, block_size, window, rotary, threads;
  int32_t pairs;  // multiply pairs of bfloat16 (vdpbf16ps) rather than float32: where that is faster
  float scale, softcap, norm_eps, norm_offset;
  int32_t amx;     // multiply bfloat16 in AMX's tiles
  int32_t latent;  // one KV head whose values are the first v_dim elements of its keys: v_pool is k_pool, v is not read
  int32_t rotate_pairs;  // neighbours are turned against each other, not the two halves of the rotary dims
  int32_t nope, up_dim;  // of expanded heads: elements of a key before its rotary part, and of a value
  int32_t storage;  // what lies in the pool: a dtype's number, or 3: int8, 4: fp8 e4m3

  // Elements from a value to the next one of its head.
  long v_row() const { return latent ? k_dim : v_dim; }
  // Whether a sequence's new tokens are nodes of a tree.
  bool is_tree(int seq) const { return ancestors && ancestors[query_starts[seq]]; }
  // Position in a tree, by depth: ancestors are all those before a token.
  long depth_position(int seq, long token) const {
    return tree_starts[seq] + __builtin_popcountll(ancestors[token]) - 1;
  }
};

// A linear layer of bfloat16; LinearCall in Python.
struct Linear {
  const void* x;
  const uint32_t* packed;
  const float* bias;     // or null
  const void* residual;  // added to the result, or null
  void* out;
  int64_t rows, x_stride, residual_stride, out_stride;
  int32_t in_features, out_features, threads, unused;
};

// What is done to rows one by one; RowCall in Python.
struct RowOp {
  const void *x, *weight, *residual;  // residual [rows][dim]: added to the norm, or null
  void* out;
  int64_t rows, dim, x_stride;  // dim: elements of a row of `out`
  int32_t dtype, threads, activation;
  float eps, offset;   // offset: added to the weight
  float alpha, limit;  // of the activation
};

// Which experts tokens go through; RoutingCall in Python.
struct Routing {
  const void* logits;  // [tokens][experts], float32 or bfloat16
  const float* bias;   // [experts], added to scores for the choice alone, or null
  int32_t* ids;        // [tokens][top_k]
  float* weights;      // [tokens][top_k]
  int64_t tokens;
  int32_t experts, top_k, groups, top_groups, dtype, scoring, normalize, threads;
  float scale;
};

// A mixture of experts; ExpertsCall in Python.
struct Experts {
  const void* x;               // [tokens][hidden]
  const int32_t* ids;          // [tokens][top_k]; what is no expert's number chooses none
  const float* weights;        // [tokens][top_k]
  const void *gate_up, *down;  // packed, of all experts
  const float *gate_up_bias, *down_bias;  // or null: [experts][2][inner], [experts][hidden], rounded up as the panels
  const void* residual;        // added to the result, or null
  void* out;                   // [tokens][hidden]
  int64_t tokens, x_stride, residual_stride;
  int32_t top_k, experts, hidden, inner, dtype, activation, pairs, threads;
  float alpha, limit;
};

// A quantized weight; QuantizedShape in Python.
struct QuantizedShape {
  int64_t in_features, out_features, group;  // group: inputs that share a scale; the last one may have fewer
  int32_t form, narrow, own_zeros, zero;     // narrow: type of scales and zeros; zero: of all groups, unless own_zeros
  int32_t gated, unused;                     // gated: out_features are as many gates, then ups; VL of each are a panel
};

// A linear layer with such a weight; QuantizedCall in Python.
struct QuantizedLinear {
  QuantizedShape shape;
  const void* x;
  const uint8_t* packed;
  const float *table, *bias;  // bias: or null
  const int32_t* order;       // or null: which input each column of the weight multiplies
  const void* residual;       // added to the result, or null
  void* out;
  int64_t rows, x_stride, residual_stride, out_stride;
  int32_t dtype, int8_inputs, threads, amx, pairs;  // amx, pairs: whether bfloat16 is multiplied so
  float scale;                                      // of int8 inputs, or 0: each row has its own
};

// A mixture of experts with such weights; QuantizedExpertsCall in Python.
struct QuantizedExperts {
  QuantizedShape gate_up, down;
  const void* x;         // [tokens][hidden]
  const int32_t* ids;    // [tokens][top_k]; what is no expert's number chooses none
  const float* weights;  // [tokens][top_k]
  const uint8_t *packed_gate_up, *packed_down;  // of all experts
  const float *gate_up_table, *down_table;      // of weights that have tables
  const int32_t *gate_up_order, *down_order;    // or null: which input each column multiplies
  const float *gate_up_bias, *down_bias;        // or null: [experts][2][inner], [experts][hidden]
  const void* residual;                         // added to the result, or null
  void* out;                                    // [tokens][hidden]
  int64_t tokens, x_stride, residual_stride;
  int32_t top_k, experts, dtype, activation, int8_inputs, threads;
  int32_t amx, pairs;  // whether bfloat16 is multiplied so
  float alpha, limit;
};

// Tokens that rows may not have; TokenMaskCall in Python.
struct TokenMaskOp {
  void* logits;                  // [rows][vocab], rows `stride` elements apart; changed in place
  const int64_t* rows;           // [count], which of them
  const uint32_t* const* masks;  // [count], of (vocab + 31) / 32 words each: a bit per token, the first in the lowest
  int64_t count, vocab, stride;
  int32_t dtype, threads;
};

// What a row draws from.
struct Filter {
  float temperature, top_p, min_p;  // temperature 0: the first of the greatest
  int32_t top_k;                    // 0: all
};

// From logits to a token per row; SampleCall in Python.
struct SampleOp {
  const void* logits;                         // [some][vocab], rows `stride` elements apart
  const uint64_t *seeds, *positions;          // [some], of the draws
  const Filter* filters;                      // [rows]
  const uint32_t* const* masks;               // [rows], as TokenMaskOp has them; null, or null for a row: none
  const int64_t* at;                          // [rows], which of the logits and draws each has; null: its own
  const int64_t* watched;                     // [num_watched], which rows come first, and `ready` is told of
  int64_t* tokens;                            // [rows] out; -1: the logits are not finite
  int64_t* kept;                              // [rows][MOST_KEPT] out, or null: see write_kept in sampling.cpp
  void (*ready)(int64_t begin, int64_t end);  // called in their order, in the caller's thread, as tokens are there
  int64_t rows, vocab, stride, num_watched;
  int32_t dtype, threads;
  int32_t again;                              // whether it is the second draw of rows without filters
};

// A call of one of these functions among others; NativeCall in Python.
struct Call {
  void (*function)();  // takes the structure; returns nothing, or, if `checked`, an int: 0 unless it failed
  const void* structure;
  int64_t checked;
};

}  // namespace baton

extern "C" {

// What the library was compiled for.
const char* baton_cpu_instructions();
// Whether pairs of bfloat16 are multiplied faster than float32 here; measured, which takes a millisecond.
int baton_pairs_are_faster();
// Whether AMX's tiles may be used.
int baton_amx_ready();

// Returns 0, or 1 for types that are not known, or not together.
int baton_paged_attention(const baton::Attention* a);

// Elements (bfloat16) of the packed weight; pack bfloat16 [out_features][in_features], aligned to 64 bytes; multiply. Then
// the same by pairs, and in AMX's tiles, which only where baton_amx_ready() says 1.
int64_t baton_linear_packed_size(int64_t out_features, int64_t in_features);
void baton_linear_pack(const uint16_t* weight, uint32_t* packed, int64_t out_features, int64_t in_features);
void baton_linear(const baton::Linear* a);
int64_t baton_linear_pairs_packed_size(int64_t out_features, int64_t in_features);
void baton_linear_pairs_pack(const uint16_t* weight, uint32_t* packed, int64_t out_features, int64_t in_features);
void baton_linear_pairs(const baton::Linear* a);
int64_t baton_linear_amx_packed_size(int64_t out_features, int64_t in_features);
void baton_linear_amx_pack(const uint16_t* weight, uint16_t* packed, int64_t out_features, int64_t in_features);
void baton_linear_amx(const baton::Linear* a);

void baton_rms_norm(const baton::RowOp* a);
void baton_gated_mul(const baton::RowOp* a);

void baton_route(const baton::Routing* a);
// Per expert: bytes of the packed gate_up and down; elements of inner and hidden, rounded up as the biases are.
void baton_experts_sizes(int64_t dtype, int64_t hidden, int64_t inner, int64_t* out);
// One expert's gate_up [2 inner][hidden], gates first, and down [hidden][inner] -> packed, aligned to 64 bytes.
void baton_experts_pack(int64_t dtype, const void* gate_up, const void* down, uint32_t* to_gate_up, uint32_t* to_down,
                        int64_t hidden, int64_t inner);
void baton_experts(const baton::Experts* a);

// Bytes of the packed weight.
int64_t baton_quantized_packed_size(const baton::QuantizedShape* a);
// values: bytes [out_features][in_features, or half of it]; int8 values signed, with zeros that are 128 higher than
// theirs. scales, zeros (or null): float32 [out_features][groups], exact in the narrow type. packed: aligned to 64.
void baton_quantized_pack(const baton::QuantizedShape* a, const uint8_t* values, const float* scales,
                          const float* zeros, uint8_t* packed);
void baton_quantized_linear(const baton::QuantizedLinear* a);
void baton_quantized_experts(const baton::QuantizedExperts* a);

void baton_mask_tokens(const baton::TokenMaskOp* a);
void baton_sample(const baton::SampleOp* a);

// Returns how many were made: all, or those before one that failed.
int64_t baton_run_calls(const baton::Call* calls, int64_t count);
}
