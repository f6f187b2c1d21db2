// A gate made of the value: log_decay = log sigmoid(w_h . v + b_h) / temperature, of each key head.

#pragma once

#include <cmath>

#include "layout.h"
#include "matrix.h"

inline float log_sigmoid(float x) {  // of NaN too
    return (x > 0 ? 0 : x) - std::log1p(std::exp(-std::abs(x)));
}

inline float log_decay_of(const Gate& gate, int64_t head, const float* value, int value_dim) {
    const float* weight = reinterpret_cast<const float*>(gate.weight) + head * value_dim;
    const int vectors = value_dim / WIDTH * WIDTH;
    float logit = reinterpret_cast<const float*>(gate.bias)[head] + dot(weight, value, vectors);
    for (int e = vectors; e < value_dim; ++e) logit += weight[e] * value[e];
    return log_sigmoid(logit) / static_cast<float>(gate.temperature);
}
