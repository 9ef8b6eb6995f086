"""Fits with coefficients that are not below 0.

Shape suffixes: R measurements, K coefficients.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["non_negative_least_squares"]


def non_negative_least_squares(matrix_RK: NDArray[np.float64], target_R: NDArray[np.float64]) -> NDArray[np.float64]:
    """The x >= 0 with the least |matrix x - target|: the active-set method of Lawson and Hanson (1974), chapter 23.

    Args:
        matrix_RK: float64 [R, K], rows of measurements.
        target_R: float64 [R].

    Returns:
        float64 [K].
    """
    size = matrix_RK.shape[1]
    solution_K = np.zeros(size)
    free_K = np.zeros(size, np.bool_)
    tolerance = 1e-10 * max(float(np.abs(matrix_RK.T @ target_R).max()), 1e-300)
    for _ in range(10 * size):
        gradient_K = np.where(free_K, -np.inf, matrix_RK.T @ (target_R - matrix_RK @ solution_K))
        if gradient_K.max() <= tolerance:
            break
        free_K[int(gradient_K.argmax())] = True
        while True:
            trial_K = np.zeros(size)
            trial_K[free_K] = np.linalg.lstsq(matrix_RK[:, free_K], target_R, rcond=None)[0]
            negative_K = free_K & (trial_K <= 0)
            if not negative_K.any():
                break
            with np.errstate(divide="ignore", invalid="ignore"):
                step = float((solution_K / (solution_K - trial_K))[negative_K].min())
            solution_K = solution_K + step * (trial_K - solution_K)
            free_K &= solution_K > 1e-14 * max(float(solution_K.max()), 1e-300)
        solution_K = trial_K
    return solution_K
